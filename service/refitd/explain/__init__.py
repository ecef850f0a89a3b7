"""The one place that turns records into sentences, and into what the API shows: runs, versions, engines."""

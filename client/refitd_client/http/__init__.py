"""The clients of the HTTP API, blocking and asynchronous, over the same routes, retries and answers."""

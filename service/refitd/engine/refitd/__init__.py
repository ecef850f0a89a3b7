"""Another refitd, which follows this service, as one engine."""

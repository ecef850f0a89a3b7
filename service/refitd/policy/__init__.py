"""Every decision of the service. Pure: records in, decisions out; nothing here does I/O."""

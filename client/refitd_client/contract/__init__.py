"""The contract between trainer, service and engines: states, names, manifest and wire types.

It lives in the client because the service imports the client and never the reverse.
Nothing here does I/O, and nothing here imports torch.
"""

"""The service's side of refitd's plugin in SGLang: which sockets belong to an engine, and the requests to them.

    client      the plugin beside one engine's HTTP API, as the adapter uses it
    handshake   what one rank says of itself: pure
    rank_group  whose handshakes belong to the engine that is asked about: pure
    trust       whose sockets are listened to: pure
    exchange    one request and its reply over a socket
    folder      which sockets there are
    channels    the engine's ranks, found and found again
    leading     which service the engine is led by: this one, for as long as it says so
    prepared    a version made ready on all ranks while the engine serves

Nothing here decides what an engine serves: that is the answer to the update itself. What a socket says can only make an
update shorter, or spare the engine one that it would refuse.
"""

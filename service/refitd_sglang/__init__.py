"""The hook of refitd's plugin in SGLang: what it wraps there, and one rank of SGLang as `refitd_plugin` sees it.

    plugin       SGLang's entry point: one function is wrapped, or nothing at all
    process      one rank: its model, its server's arguments, and how its loads are given tensors

Nothing of SGLang or torch is imported before SGLang has loaded it.
"""

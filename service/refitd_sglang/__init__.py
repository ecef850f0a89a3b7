"""The hook of refitd's plugin in SGLang: what it wraps there, and one rank of SGLang as `refitd_plugin` sees it.

    plugin       SGLang's entry point: one function is wrapped, or nothing at all
    versions     what each release of SGLang looks like, as far as the plugin touches it
    process      one rank: its model, its server's arguments
    feeding      gives SGLang's own update function tensors in place of files
    quantised    models that SGLang can load once and not again

Nothing of SGLang or torch is imported before SGLang has loaded it.
"""

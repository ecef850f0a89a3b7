"""Safetensors on disk, as the service, the SDK and the plugin read them: headers, index, layout, finite values."""

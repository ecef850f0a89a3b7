"""An upstream (another refitd, an object store) into this root."""

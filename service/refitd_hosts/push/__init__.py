"""Good versions of this root, pushed into an object store."""

"""A process that reads versions ahead for a rank (`process`), as the rank sees it (`worker`)."""

"""A run in an object store: where its objects lie, how versions get there, and how they are collected."""

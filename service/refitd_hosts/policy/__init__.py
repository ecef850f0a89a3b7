"""Decisions about hosts and upstreams. Pure."""

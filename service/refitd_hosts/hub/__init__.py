"""The hub's side of hosts: what they report, what they are told, and what they pull."""

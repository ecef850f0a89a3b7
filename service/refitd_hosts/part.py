"""What ring 3 registers."""

from refitd.parts import CommandLine, Part

PART = Part(
    commands={
        "collect": CommandLine("Change", "refitd_hosts.collect", "Delete what nothing needs from an object store.")
    }
)

"""What people look at registers."""

from refitd.parts import CommandLine, Part

PART = Part(
    commands={
        "top": CommandLine(
            "Look", "refitd_console.top", "Watch engines and versions, live.", words=("watch", "monitor", "dashboard")
        )
    }
)

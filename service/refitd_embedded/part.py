"""What the embedded engine registers: the demo."""

from refitd.parts import CommandLine, Part

PART = Part(
    commands={
        "demo": CommandLine(
            "Run it",
            "refitd_embedded.demo.command",
            "Watch two engines follow a trainer that really learns.",
            is_first=True,
        )
    }
)

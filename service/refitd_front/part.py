"""What the front registers."""

from refitd.parts import CommandLine, Part

PART = Part(
    commands={
        "front": CommandLine(
            "Run it",
            "refitd_front.command",
            "Stand between a trainer and its engines, in their protocol.",
            words=("areal", "facade", "gateway"),
        )
    }
)

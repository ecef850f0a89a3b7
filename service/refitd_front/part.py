"""What the front registers."""

from refitd.parts import CommandLine, Part

PART = Part(
    commands={
        "front": CommandLine(
            "Run it",
            "refitd_front.command",
            "Answer a trainer's calls in its engines' place: it changes one URL.",
            words=("areal", "facade", "gateway"),
        )
    }
)

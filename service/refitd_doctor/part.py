"""What the diagnosis registers."""

from refitd.parts import CommandLine, Part

_ALSO_CALLED = ("check", "diagnose", "test", "fsck", "repair", "verify", "scrub", "adopt")
PART = Part(
    commands={
        "doctor": CommandLine(
            "Run it",
            "refitd_doctor.command",
            "Check what a job will need, and repair what no start repairs.",
            is_first=True,
            words=_ALSO_CALLED,
        )
    }
)

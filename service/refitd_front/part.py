"""What the front registers."""

from refitd.parts import CommandLine, Part

PART = Part(
    commands={"areal": CommandLine("Run it", "refitd_front.areal.command", "Stand between AReaL and its engines.")}
)

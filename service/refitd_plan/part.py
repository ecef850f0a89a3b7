"""What the planner registers."""

from refitd.parts import CommandLine, Part

PART = Part(
    commands={
        "plan": CommandLine(
            "Run it", "refitd_plan.command", "Plan a job: which way the weights go, and whether all fits."
        )
    }
)

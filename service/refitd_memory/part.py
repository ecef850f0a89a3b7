"""What ring 2 registers."""

from refitd.parts import Part

PART = Part(compose="refitd_memory.secret:compose")

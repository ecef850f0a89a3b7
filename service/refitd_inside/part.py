"""What ring 1 registers."""

from refitd.parts import Part

PART = Part(compose="refitd_inside.composing:compose", plugins="refitd_inside.client.client:plugins_under")

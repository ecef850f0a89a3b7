"""What rings 1 and 2 register."""

from refitd.parts import Part

PART = Part(compose="refitd_inside.composing:compose", plugins="refitd_inside.client.client:plugins_under")

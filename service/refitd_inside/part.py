"""What ring 1 registers."""

from refitd.parts import Part

PART = Part(plugins="refitd_inside.client.client:plugins_under")

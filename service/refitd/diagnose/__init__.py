"""What is wrong, and what to do about it: `refitd doctor`, `refitd fsck`, and checks of settings before a start."""

"""Where a version lies, and how its bytes get into the model.

source         a version on disk: looked at, checked, mapped; and the model that the server began with
imported       the memory of trainers that a rank has open; `offered` is a version there
spans          stretches of memory, and copies as moves of memory
driver         CUDA's copies by address, and files that stay registered with the driver
copy_schedule  how a plan's copies reach a GPU; `kernels` are what it does there
"""

"""`make reference`: write the pages and the pictures anew."""

from generate import pages
from generate.pictures import pictures

for path, text in (pages() | pictures()).items():
    path.write_text(text)

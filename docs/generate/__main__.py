"""`make reference`: write the pages anew."""

from generate import pages

for path, text in pages().items():
    path.write_text(text)

"""`refitd fsck`: where journal, disk and engines disagree, and what of that can be repaired safely.

gather      journal (read only), disk, engines: facts        thin shells
compare     facts → findings                                 pure
mend        findings → repairs, behind the root's lock       a thin shell, over the service's own store and trash
"""

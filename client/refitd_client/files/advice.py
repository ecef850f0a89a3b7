"""What an operator can do about an error of the file system, for sentences that name a folder."""

import errno


def with_advice(error: OSError) -> str:
    """An error that a folder could not be made or written by, and what to do where that is known."""
    match error.errno:
        case errno.EROFS:
            todo = "its file system is mounted read-only: mount it to be written, or name another folder"
        case errno.EACCES | errno.EPERM:
            todo = (
                "this user may not write there: give the folder to a group that trainer and service share, and take "
                "away what locks it (chattr -i)"
            )
        case errno.EEXIST | errno.ENOTDIR:
            todo = "a file lies where the folder, or one above it, should be: name a folder"
        case _:
            return str(error)
    return f"{error}; {todo}"

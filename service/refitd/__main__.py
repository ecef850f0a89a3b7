"""The `refitd` command. The SDK is installed without what the command needs: then it says so in one line."""

import sys

_EMBEDDED = frozenset({"torch"})


def main() -> None:
    """Run the command line and exit."""
    try:
        from refitd.cli.app import app

        app()
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package.startswith("refitd") or not package:
            raise
        extra = "embedded" if package in _EMBEDDED else "service"
        print(f"refitd: the module {package} is missing: pip install '.[{extra}]' in its clone", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()

"""Print the requirements a wheel lists, without some: `wheel_requirements.py FILE.whl --without torch,mcp`.

A name to leave out also leaves out the packages that begin with it (torch: torchvision, torchaudio).
"""

from __future__ import annotations

import argparse
import email
import re
import sys
import zipfile


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("wheel")
    parser.add_argument("--without", default="", metavar="NAME[,NAME]")
    args = parser.parse_args()
    left_out = tuple(name for name in args.without.split(",") if name)
    with zipfile.ZipFile(args.wheel) as archive:
        name = next(n for n in archive.namelist() if n.endswith(".dist-info/METADATA"))
        metadata = email.message_from_bytes(archive.read(name))
    for line in metadata.get_all("Requires-Dist") or []:
        if re.search(r";.*\bextra\b", line) or (left_out and line.lower().startswith(left_out)):
            continue
        sys.stdout.write(line + "\n")


if __name__ == "__main__":
    main()

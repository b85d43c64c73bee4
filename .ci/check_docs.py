"""Checks the documentation: every relative link leads somewhere, and every ``hvdtrain`` command shown exists."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from hvdtrain.cli import COMMANDS

ROOT = Path(__file__).resolve().parent.parent


def broken_links(page: Path) -> list[str]:
    """Relative links of a page whose target is not there."""
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
    relative = [link for link in links if "://" not in link and not link.startswith("mailto:")]
    return [f"{page.relative_to(ROOT)}: {link} is not there" for link in relative if not (page.parent / link).exists()]


def unknown_commands(page: Path) -> list[str]:
    """Commands typed at the beginning of a line of a code block that ``hvdtrain`` does not have."""
    blocks = re.findall(r"^```[^\n]*\n(.*?)^```", page.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    names = re.findall(r"^\s*(?:\$ )?hvdtrain ([a-z][a-z-]*)\b", "\n".join(blocks), re.MULTILINE)
    return [f"{page.relative_to(ROOT)}: there is no 'hvdtrain {name}'" for name in sorted(set(names) - set(COMMANDS))]


def main() -> int:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    problems = [problem for page in pages for problem in broken_links(page) + unknown_commands(page)]
    print("\n".join(problems) or f"{len(pages)} pages: every relative link and every command is there")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

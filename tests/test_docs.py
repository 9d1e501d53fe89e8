"""What the documents say is what the code does."""

import re
from pathlib import Path

from llmcollect.schema import COLUMN_DOCS, FORMAT_VERSION, STEP_SCHEMA

REPO = Path(__file__).resolve().parents[1]


def test_the_schema_page_is_the_schema() -> None:
    page = (REPO / "docs" / "schema.md").read_text()
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (yes|no) \| (.+) \|$", page, re.MULTILINE)
    expected = [
        (field.name, str(field.type).replace("|", "\\|"), "yes" if field.nullable else "no", COLUMN_DOCS[field.name])
        for field in STEP_SCHEMA
    ]
    assert rows == expected
    assert f"Format version {FORMAT_VERSION}" in page


def test_the_readme_prints_the_example() -> None:
    """The README's program is `examples/iterate.py` but for its imports' order and its comments."""

    def statements(text: str) -> list[str]:
        lines = [re.sub(r"\s*#.*", "", line).rstrip() for line in text.splitlines()]
        return [line for line in lines if line and not line.startswith('"""')]

    readme = (REPO / "README.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    assert statements((REPO / "examples" / "iterate.py").read_text()) in [statements(block) for block in blocks]


def test_files_that_the_readme_names_exist() -> None:
    readme = (REPO / "README.md").read_text()
    for path in re.findall(r"\]\(([\w./-]+)\)", readme):
        assert (REPO / path).exists(), path

"""The licence on a draft's card: the user's, else the one that its target's card names, else none."""

import pytest

from eagle_train.artifacts.license import check_license, license_of_target
from eagle_train.errors import UserError


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ("---\nlanguage: en\nlicense: llama3.1\ntags: [a]\n---\n# A target\n", "llama3.1"),
        ('---\nlicense: "apache-2.0"\n---\n', "apache-2.0"),
        ("---\nlicense: other\nlicense_name: ours\n---\n", None),
        ("---\nlicense:\n- mit\n---\n", None),
        ("---\ntags: [a]\n---\nlicense: mit\n", None),
        ("# A target\n\nlicense: mit\n", None),
        ("", None),
    ],
)
def test_the_card_of_a_target_is_read(tmp_path, card, license):
    (tmp_path / "README.md").write_text(card)
    assert license_of_target(str(tmp_path)) == license


def test_without_a_card_nothing_is_said(tmp_path):
    assert license_of_target(str(tmp_path)) is None
    assert license_of_target("nobody/nothing") is None
    assert license_of_target("data/tiny_target") is None


@pytest.mark.parametrize("license", ["Apache 2.0", "mit\ntags: [x]", ""])
def test_what_is_no_identifier_is_refused(license):
    check_license("cc-by-nc-4.0")
    with pytest.raises(UserError, match="must be an identifier of the hub"):
        check_license(license)

"""How regular expressions and JSON schemas become EBNF, the one language that xgrammar is given."""

"""A clock that only models move (the fixture `clock` of conftest.py): calls of a method that take so long on it."""


def taking(monkeypatch, clock: list[float], owner: type, name: str, seconds: float) -> None:
    """Let each call of a method take so long."""
    real = getattr(owner, name)

    def slow(*arguments, **options):
        clock[0] += seconds
        return real(*arguments, **options)

    monkeypatch.setattr(owner, name, slow)

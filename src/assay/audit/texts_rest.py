REST: dict[str, dict[str, str]] = {}

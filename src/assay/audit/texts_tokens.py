TOKENS: dict[str, dict[str, str]] = {}

CREDIT: dict[str, dict[str, str]] = {}

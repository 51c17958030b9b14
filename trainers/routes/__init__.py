"""What the routers of a training chose, on disk: every rank writes its own tokens' choices, and any fold reads them again."""

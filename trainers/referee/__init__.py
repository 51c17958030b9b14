"""Other projects on this machine's processors against one process of the same model: `foldray verify --peer`."""

"""Discovery, checks and hooks of plugins. What a plugin itself imports is ``mini_infer.plugins`` and the interfaces."""

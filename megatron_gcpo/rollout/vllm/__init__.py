"""vLLM as a rollout engine: in the leader's process or beside it (``inprocess``), or behind URLs (``server``).

``settings`` what vLLM reads from the environment; ``capabilities`` what the installed vLLM can do, and whether a model
fits it; ``arguments`` the arguments of an engine and the model folder it starts from; ``requests`` our requests as
vLLM's and its answers as ours. These four hold no state and serve both kinds of engine; ``adapters`` and ``adopt`` are of
the colocated one alone. Nothing here imports vLLM when it is
imported itself: the settings must come first.
"""

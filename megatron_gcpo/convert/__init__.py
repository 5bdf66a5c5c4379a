"""Hugging Face checkpoints to and from the trainer's own, streamed tensor by tensor; no model is ever built in memory.

    to_megatron.convert(source, target, *, cluster=ClusterConfig(), dtype=None, options=Options()) -> Path
        A folder that model.start_from takes. ``cluster`` decides how tensors are cut and grouped into files; any other
        layout reads them too.
    to_hf.convert(source, target, *, reference=None, dtype=None, options=Options()) -> Path
        ``source``: a checkpoint of a run, the run's folder, or a torch_dist folder of plain Megatron-Core (then
        ``reference``, a Hugging Face folder, says which model it is).
    hf_writer.write_checkpoint(target, tensors, *, hf_config, carry_from=None, max_shard_bytes=...) -> Path
        For a trainer that has the tensors: an iterator of (Hugging Face name, CPU tensor) becomes a folder of safetensors
        with config, tokenizer and index, in place only once it is whole. Call it on one rank.
    compare.compare(a, b, *, reference=None) -> Comparison
    describe.describe(path) -> Description

``Options`` (work.py): max_shard_bytes, processes, allow_pickle, overwrite, progress. Everything raises ValueError with one
line for the user. How it works and which models pass: README.md.
"""

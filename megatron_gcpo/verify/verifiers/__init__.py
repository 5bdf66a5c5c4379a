"""One verifier per file; the table of all of them is in megatron_gcpo.verify.table."""

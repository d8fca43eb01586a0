"""The loop: plan, draft, run, verify, commit, observe."""

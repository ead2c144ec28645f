"""The judgement: laws, what runs them on kernels, and tests of the suite itself."""

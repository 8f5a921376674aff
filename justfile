# The commands that people type. `just --list` shows them; none of them needs just.

# three small apiservers behind jackstay, six faults, a live table
demo:
    cargo run --release -- demo

# all tests that need only the Rust toolchain and a C compiler
test *filter:
    cargo test --locked {{ filter }}

# what a pull request must pass: formatting, lints, licences, tests
quick:
    .ci/run quick

# tests with real Kubernetes components (root, Debian 12): modules, classes or tests by their unittest names
real *names:
    tests/real/run {{ names }}

# CPU per request, latency, memory, beside HAProxy, nginx and Envoy
bench *options:
    cargo bench --locked --bench peers -- {{ options }}

//! Small kernels for tests, benches and the command line, on a GPU and as equivalent closures on the simulated device.
//!
//! | module | kernels |
//! |---|---|
//! | [`exercise`] | keep a stream busy, write patterns, verify them |
//! | [`certify`] | single accesses, valid or not, for the certification of memory checkers |
//!
//! `kernels/` has each CUDA source beside the PTX that `scripts/build-kernels` built from it. The caller orders the work: a
//! launch does not announce the buffers that it uses.

pub mod certify;
pub mod exercise;

#[cfg(test)]
mod tests {
    use xlog_testing::kernels::{Kernel, assert_complete, assert_loadable, assert_stamped};

    const KERNELS: [Kernel<'static>; 2] = [
        Kernel {
            name: crate::certify::IMAGE.name(),
            ptx: crate::certify::IMAGE.ptx(),
            source: include_str!("../kernels/certify.cu"),
        },
        Kernel {
            name: crate::exercise::IMAGE.name(),
            ptx: crate::exercise::IMAGE.ptx(),
            source: include_str!("../kernels/exercise.cu"),
        },
    ];

    #[test]
    fn no_source_is_left_out_of_these_tests() {
        assert_complete(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels"), &KERNELS);
    }

    #[test]
    fn every_ptx_was_built_from_the_source_beside_it() {
        assert_stamped(&KERNELS);
    }

    #[test]
    fn the_oldest_driver_that_is_accepted_can_load_every_ptx() {
        assert_loadable(&KERNELS);
    }
}

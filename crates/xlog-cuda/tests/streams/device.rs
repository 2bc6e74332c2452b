//! Opening a device: what is accepted, what is refused, and that a refusal says why.

use std::fmt::Debug;
use std::process::Command;
use std::sync::Arc;

use xlog_cuda::device_runtime::{StreamLease, StreamPool, StreamPoolError, StreamPriority};
use xlog_cuda::driver::{DeviceKind, DriverError};
use xlog_cuda::sim::{Call, Fault, SimConfig, SimMachine};
use xlog_cuda::{CudaDevice, DeviceSpec, DeviceStream, Gate, RaceReport, StreamId, XlogError};
use xlog_testing::{Buffer, for_each_device, for_each_sim, specs};

#[test]
fn a_bad_spec_is_refused_by_name_and_says_what_is_accepted() {
    let bad = ["cuda:x", "sim:-1", "", "gpu", "sim:99999999999999999999", "cuda:", " sim", "cuda"];
    for spec in bad {
        let error = CudaDevice::open(spec).unwrap_err();
        let XlogError::BadDeviceSpec { spec: named, .. } = &error else {
            panic!("{spec:?} gave {error:?}");
        };
        assert_eq!(named, spec);
        let message = error.to_string();
        assert!(message.contains(&format!("{spec:?}")), "{message}");
        for form in ["\"cuda:N\"", "\"sim\"", "\"sim:SEED\""] {
            assert!(message.contains(form), "{message} does not offer {form}");
        }
    }
}

#[test]
fn a_gpu_that_is_not_there_is_refused_by_name_and_says_what_to_do() {
    for (spec, opened) in [
        ("cuda:99", CudaDevice::open("cuda:99")),
        ("cuda:99", CudaDevice::new(99)),
        ("cuda:4294967296", CudaDevice::new(1 << 32)),
    ] {
        let error = opened.unwrap_err();
        assert!(error.to_string().contains(&format!("{spec:?}")), "{error}");
        let XlogError::Open { cause: DriverError::Unavailable { what, remedy }, .. } = &error
        else {
            panic!("{spec} gave {error:?}");
        };
        assert!(!what.is_empty() && !remedy.is_empty(), "{error}");
    }
}

#[test]
fn a_device_says_what_it_was_opened_as() {
    for_each_device(|device| {
        let spec: DeviceSpec = device.spec().parse().unwrap();
        let properties = device.properties();
        assert!(specs().contains(&spec.to_string()));
        assert_eq!(spec.is_simulated(), device.sim().is_some());
        assert_eq!(spec.is_simulated(), properties.kind == DeviceKind::Simulated);
        assert_eq!(device.ordinal(), properties.ordinal);
        let memory = device.memory_info().unwrap();
        assert!(memory.free > 0 && memory.free <= memory.total, "{memory:?}");
        device.synchronize().unwrap();
        assert!(format!("{device:?}").contains(device.spec()));
    });
}

#[test]
fn the_same_spec_opened_twice_gives_two_devices() {
    for_each_device(|device| {
        let twin = Arc::new(CudaDevice::open(device.spec()).unwrap());
        assert!(!Arc::ptr_eq(device.driver(), twin.driver()));
        let pool = StreamPool::with_defaults(twin.clone());
        let buffer = Buffer::new(&twin, 64);
        buffer.fill(&pool.lease().unwrap(), 1).unwrap();
    });
}

#[test]
fn devices_of_one_simulated_machine_keep_their_ordinals() {
    for seed in [None, Some(3)] {
        let mut config = SimConfig::default().with_ordinals(2).with_capacity(1 << 20);
        config.seed = seed;
        let machine = SimMachine::new(config).unwrap();
        for ordinal in 0..2 {
            let device = CudaDevice::from_sim(machine.device(ordinal).unwrap());
            assert_eq!(device.ordinal(), ordinal);
            assert_eq!(device.memory_info().unwrap().total, 1 << 20);
            assert_eq!(device.spec(), if seed.is_some() { "sim:3" } else { "sim" });
        }
        assert!(machine.device(2).is_err());
    }
}

#[test]
fn a_driver_passed_in_is_used_as_it_is() {
    for_each_device(|device| {
        let wrapped = Arc::new(CudaDevice::from_driver(device.driver().clone()));
        assert!(Arc::ptr_eq(wrapped.driver(), device.driver()));
        assert!(wrapped.sim().is_none());
        let pool = StreamPool::with_defaults(wrapped.clone());
        let stream = pool.lease().unwrap();
        let buffer = Buffer::new(&wrapped, 128);
        buffer.fill(&stream, 2).unwrap();
        assert_eq!(buffer.read(&stream).unwrap(), [2; 128]);
    });
}

#[test]
fn a_memory_pool_that_fails_to_be_made_is_made_at_the_next_call() {
    for_each_sim(|device, sim| {
        let faults = sim.faults();
        assert_eq!(faults.calls(Call::PoolCreate), 0, "the pool is made before it is needed");
        faults.fail_nth(Call::PoolCreate, 1, Fault::OutOfMemory);
        let error = device.memory_pool().unwrap_err();
        assert!(matches!(error, XlogError::Driver(DriverError::OutOfMemory { .. })), "{error:?}");
        let pool = device.memory_pool().unwrap();
        assert_eq!(device.memory_pool().unwrap(), pool);
        assert_eq!(faults.calls(Call::PoolCreate), 2);
    });
}

#[test]
fn a_device_gives_its_memory_pool_back() {
    for_each_sim(|device, sim| {
        let owner = CudaDevice::from_sim(sim.clone());
        let pool = owner.memory_pool().unwrap();
        drop(owner);
        assert_eq!(sim.faults().calls(Call::PoolDestroy), 1);
        let usage = device.driver().async_pools().unwrap().pool_usage(pool);
        assert!(usage.is_err(), "the pool outlived its device");
    });
}

#[test]
fn a_device_without_stream_ordered_pools_says_so() {
    let config = SimConfig::default().with_async_pools(false);
    let device = CudaDevice::from_sim(xlog_cuda::sim::SimDevice::open(config).unwrap());
    let error = device.memory_pool().unwrap_err();
    assert_eq!(error, XlogError::Driver(DriverError::Unsupported { call: "memory_pool" }));
}

/// The environment cannot be changed inside a process with threads, so this test runs itself again in another.
#[test]
fn the_default_device_is_what_the_environment_says_and_never_an_invented_one() {
    let ask = |value: Option<&str>| {
        let mut child = Command::new(std::env::current_exe().unwrap());
        child.args([
            "--ignored",
            "--exact",
            "--nocapture",
            "device::child_prints_its_default_spec",
        ]);
        match value {
            Some(value) => child.env("XLOG_DEVICE", value),
            None => child.env_remove("XLOG_DEVICE"),
        };
        let output = child.output().unwrap();
        assert!(output.status.success());
        String::from_utf8(output.stdout).unwrap()
    };
    assert!(ask(None).contains("default is Ok(Cuda(0))"));
    assert!(ask(Some("sim")).contains("default is Ok(Sim)"));
    assert!(ask(Some("sim:5")).contains("default is Ok(SimSeeded(5))"));
    for bad in ["", "gpu"] {
        let answer = ask(Some(bad));
        assert!(answer.contains("BadDeviceSpec") && answer.contains("XLOG_DEVICE"), "{answer}");
    }
}

#[test]
#[ignore = "run by the test above in a process of its own"]
fn child_prints_its_default_spec() {
    println!("default is {:?}", CudaDevice::default_spec());
}

#[test]
fn public_types_can_be_shared_between_threads_and_printed() {
    fn check<T: Send + Sync + Debug>() {}
    check::<CudaDevice>();
    check::<DeviceSpec>();
    check::<DeviceStream>();
    check::<Gate>();
    check::<RaceReport>();
    check::<StreamId>();
    check::<StreamLease>();
    check::<StreamPool>();
    check::<StreamPoolError>();
    check::<StreamPriority>();
    check::<XlogError>();
}

//! `xlogmem bench` as its users meet it.

use crate::support::{assert_refused, json, text, xlogmem};

#[test]
fn every_comparison_is_there_with_its_ratio_and_spread() {
    let output =
        xlogmem().args(["bench", "--quick", "--json", "--device", "sim"]).output().unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", text(&output.stderr));
    let report = json(&output);
    assert_eq!((&report["schema"], &report["ok"]), (&1.into(), &true.into()));
    let machine = &report["machine"];
    assert!(machine["cores"].as_u64() > Some(0), "{machine}");
    assert_eq!((&machine["device"], &machine["driver_api_version"]), (&"sim".into(), &().into()));
    let groups = report["groups"].as_array().unwrap();
    let variants = |name: &str| {
        let group = groups.iter().find(|group| group["name"] == name);
        let group = group.unwrap_or_else(|| panic!("no group {name} in {report:#}"));
        let names = group["variants"].as_array().unwrap().iter();
        names.map(|variant| variant["name"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    for size in ["256 bytes", "4 KiB", "64 KiB", "1 MiB", "16 MiB", "64 MiB"] {
        assert_eq!(variants(&format!("allocate and free {size}")), ["direct", "async", "pool"]);
    }
    assert_eq!(variants("use on the block's own stream"), ["async", "pool"]);
    assert_eq!(variants("use on two streams in turn"), ["record and wait", "prepare and finish"]);
    for size in ["1 KiB", "1 MiB"] {
        let name = format!("allocate and free {size} by the driver's pool");
        assert_eq!(variants(&name), ["bare driver", "async"]);
    }
    assert_eq!(variants("allocate and free 1 KiB under what is on top").len(), 5);
    for group in groups {
        let variants = group["variants"].as_array().unwrap();
        assert_eq!(variants[0]["ratio"], 1.0, "{group}");
        for variant in variants {
            let number = |key: &str| variant[key].as_f64().unwrap();
            let (low, high) = (number("low_nanos"), number("high_nanos"));
            assert!(low > 0.0 && low <= number("median_nanos"), "{variant}");
            assert!(number("median_nanos") <= high && number("ratio") > 0.0, "{variant}");
        }
    }
}

#[test]
fn a_device_that_is_none_is_refused() {
    let refused = xlogmem().args(["bench", "--device", "tpu:0"]).output().unwrap();
    assert_refused(&refused, &["tpu:0"]);
}

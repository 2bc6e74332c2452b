"""Tests of scripts/house: what counts as a test, as a tuple, as a function."""

import importlib.machinery
import importlib.util
import pathlib
import unittest

LOADER = importlib.machinery.SourceFileLoader("house", str(pathlib.Path(__file__).with_name("house")))
house = importlib.util.module_from_spec(importlib.util.spec_from_loader("house", LOADER))
LOADER.exec_module(house)


class Lines(unittest.TestCase):
    def count(self, text):
        kept, modules = house.without_tests(text)
        return kept.count("\n"), modules

    def test_items_under_cfg_test_do_not_count(self):
        text = 'fn a() {}\n\n#[cfg(test)]\n#[allow(dead_code)]\nmod tests {\n    const S: &str = "}";\n    // }\n}\nfn b() {}\n'
        self.assertEqual(self.count(text), (3, []))
        self.assertEqual(self.count("impl A {\n    #[cfg(test)]\n    fn a(x: [u8; 2]) -> u8 {\n        1\n    }\n}\n"), (2, []))
        self.assertEqual(self.count('#[cfg(all(test, feature = "sim"))]\nmod tests {\n    fn a() {}\n}\nfn b() {}\n'), (1, []))

    def test_files_of_test_modules_are_named(self):
        self.assertEqual(self.count("mod a;\n#[cfg(test)]\nmod tests;\n#[cfg(test)]\npub(crate) mod more;\n"), (1, ["tests", "more"]))

    def test_texts_and_lifetimes_hide_nothing(self):
        text = "fn f<'a>(x: &'a str) -> char { '}' }\nconst R: &str = r#\"#[cfg(test)] {\"#;\n"
        self.assertEqual(self.count(text), (2, []))


class Tuples(unittest.TestCase):
    def tuples(self, text):
        return [part for _, parts in house.parameters(text) for part in parts if house.is_tuple(part)]

    def test_a_tuple_or_a_reference_to_one_counts(self):
        text = "fn f<T: Fn(u8) -> u8>(&self, (a, b): (u8, T), c: &'a mut (u8, u8), d: u8) {}"
        self.assertEqual(self.tuples(text), ["(a, b): (u8, T)", "c: &'a mut (u8, u8)"])

    def test_what_only_looks_like_one_does_not(self):
        text = "fn f(a: (), b: &(dyn A + B), c: &[(u8, u8)], d: impl Fn((u8, u8)) -> (u8, u8), e: Option<(u8, u8)>) {}"
        self.assertEqual(self.tuples(text), [])


class Walk(unittest.TestCase):
    def test_functions_of_the_project_count_once(self):
        root = house.ROOT
        profile = (
            f"fl={root}/crates/a/src/x.rs\nfn=a::x::f\n1 2\nfn=a::x::f::{{{{closure}}}}\nfn=a::x::g'2\n"
            f"fl=/rustc/library/core.rs\nfn=core::h\nfl={root}/crates/xlog-cuda/examples/walk.rs\nfn=walk::main\n"
        )
        self.assertEqual(house.entered(profile), [("crates/a/src/x.rs", "a::x::f"), ("crates/a/src/x.rs", "a::x::g")])


if __name__ == "__main__":
    unittest.main()

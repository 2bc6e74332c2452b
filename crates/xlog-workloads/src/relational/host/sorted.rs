//! Verifies sorted numbers on the host: their count, their order and their fingerprint.

use super::super::numbers::{Fingerprint, number};
use super::super::sort::Sort;
use super::parts;

/// Up to this size the host also sorts and compares number by number.
const SORTED_HERE: usize = 1 << 22;

/// Checks the result of a sort; an error names the fault.
///
/// Numbers in order with the fingerprint of the generated ones are the sorted ones. A small result is also compared with the
/// host's own sort.
pub fn examine(sort: &Sort, numbers: &[u64], threads: usize) -> Result<(), String> {
    if numbers.len() != sort.rows {
        return Err(format!("there are {} numbers instead of {}", numbers.len(), sort.rows));
    }
    let seed = sort.number_seed();
    let found = parts(sort.rows, threads, |range| {
        // The first of two parts compares their adjacent numbers.
        let end = (range.end + 1).min(numbers.len());
        let window = numbers.get(range.start..end).unwrap_or_default();
        if let Some(at) = window.windows(2).position(|two| two[0] > two[1]) {
            let row = range.start + at;
            return Err(format!("rows {row} and {} are not in order", row + 1));
        }
        let (mut made, mut met) = (Fingerprint::default(), Fingerprint::default());
        for row in range {
            made.add(number(seed, row as u64));
            met.add(numbers[row]);
        }
        Ok((made, met))
    });
    let (mut made, mut met) = (Fingerprint::default(), Fingerprint::default());
    for part in found {
        let part = part?;
        made.merge(&part.0);
        met.merge(&part.1);
    }
    if made != met {
        return Err("the numbers are in order, but they are not those that went in".to_owned());
    }
    if sort.rows <= SORTED_HERE {
        let mut own: Vec<u64> = (0..sort.rows as u64).map(|row| number(seed, row)).collect();
        own.sort_unstable();
        if let Some(row) = own.iter().zip(numbers).position(|(own, found)| own != found) {
            return Err(format!("row {row} is {} instead of {}", numbers[row], own[row]));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    type Damage = fn(&mut Vec<u64>);

    #[test]
    fn what_is_not_the_sorted_numbers_is_told() {
        let sort = Sort { rows: 1000, seed: 9 };
        let mut good: Vec<u64> = (0..1000).map(|row| number(sort.number_seed(), row)).collect();
        good.sort_unstable();
        for threads in [1, 3, 4000] {
            assert_eq!(sort.verify(&good, threads).wrong, None);
            let damage: [(&str, Damage); 4] = [
                ("instead of 1000", |numbers| numbers.truncate(999)),
                ("not in order", |numbers| numbers.swap(499, 500)),
                ("not those", |numbers| numbers[500] = numbers[501]),
                ("not in order", |numbers| numbers[333] = 0),
            ];
            for (words, damage) in damage {
                let mut bad = good.clone();
                damage(&mut bad);
                let wrong = sort.verify(&bad, threads).wrong.unwrap();
                assert!(wrong.contains(words), "{wrong} does not say {words}");
            }
        }
    }
}
